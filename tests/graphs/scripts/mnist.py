"""A classifier of random images, with a schedule and a test after each epoch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(16 * 12 * 12, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc(torch.flatten(self.drop(x), 1)), 1)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for i, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(epoch, i, loss.item())


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for d, t in loader:
            correct += model(d.to(device)).argmax(1).eq(t).sum().item()
    print(correct)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=16, metavar="N")
    p.add_argument("--test-batch-size", type=int, default=100)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=1.0)
    args = p.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    data = torch.utils.data.TensorDataset(torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,)))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, 1)
    for e in range(args.epochs):
        train(args, model, device, loader, optimizer, e)
        test(model, device, loader)
        scheduler.step()


if __name__ == "__main__":
    main()
